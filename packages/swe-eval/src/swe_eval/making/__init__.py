"""Makes tasks from a repository with a pytest suite: the world around `swe_eval.generate.plan`.

`warm` and `witness` run in sandboxes, `suite` drives them, `maker` puts it together.
"""
