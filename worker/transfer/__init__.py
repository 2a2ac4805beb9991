"""Moving bytes: each copy is a child process of its own."""
