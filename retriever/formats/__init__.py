"""What a corpus may look like before it is `{"id", "contents"}` lines."""
