"""How objects are named in the parent and rebuilt in a worker."""
