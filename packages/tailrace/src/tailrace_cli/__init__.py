"""The tailrace command: demo, up, status, doctor, report."""
