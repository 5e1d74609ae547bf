"""Stand-ins for tests of what trains, and of what talks to a trainer."""
