"""Other trainers, started on a dataset of ours."""
