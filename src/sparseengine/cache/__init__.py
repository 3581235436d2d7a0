"""Head pages, rows, tables and side tensors: everything the engine stores."""
