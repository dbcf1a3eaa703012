"""One file per optimization method; `catalogue` lists them."""
