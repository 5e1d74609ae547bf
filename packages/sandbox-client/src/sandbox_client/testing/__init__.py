"""For tests and benchmarks: real services as processes of their own, and what back-ends need."""
