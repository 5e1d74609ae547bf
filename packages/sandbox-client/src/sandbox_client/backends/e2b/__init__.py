"""Back-end `e2b`: sandboxes in E2B's cloud, or at any endpoint that speaks its API."""
