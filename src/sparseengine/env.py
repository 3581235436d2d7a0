"""The only reader of os.environ."""
