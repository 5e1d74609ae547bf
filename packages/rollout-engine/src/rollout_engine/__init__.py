"""Runs groups of agent attempts against SGLang engines and keeps every finished one."""
