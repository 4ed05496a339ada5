"""The static checks, one file per subject: each is a function from a Subject to findings, and loads no model."""
