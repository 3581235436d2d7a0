"""What a sparse method costs in quality, always beside dense and two controls."""
