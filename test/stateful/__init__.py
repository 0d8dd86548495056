"""Programs with state."""
