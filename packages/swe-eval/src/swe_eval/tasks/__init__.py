"""Tasks: what they are, where they come from, and the sets that a service offers."""
