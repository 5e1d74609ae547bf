"""SFT and fully asynchronous GRPO for coding agents."""
