"""An E2B-compatible endpoint: E2B's unmodified SDK works against this service's sandboxes.

REST and envd share one address; the SDK is pointed at it by its own variables::

    E2B_API_URL=http://127.0.0.1:7102 E2B_SANDBOX_URL=http://127.0.0.1:7102 E2B_API_KEY=any-key

Rooms: `rest` and `templates` serve the REST API over `sandboxes` and `catalog`; `envd_processes`
and `envd_files` serve what E2B runs inside each sandbox; `framing`, `entries`, `paging`, `metrics`
and `rest_views` are pure. Needs the extra `e2b-api`.
"""
