"""Scripts that read the source of the repository, and import none of it."""
