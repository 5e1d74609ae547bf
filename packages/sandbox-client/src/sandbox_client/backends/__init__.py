"""Where sandboxes really run, behind one protocol."""
