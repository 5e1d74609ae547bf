"""What computes: forward, backward, optimizer. One protocol, several back-ends."""
