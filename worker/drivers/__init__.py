"""What a backend can do: create, delete, extend and find volumes on its storage."""
