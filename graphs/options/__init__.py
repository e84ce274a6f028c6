"""A runner's options: checked, measured where they are "auto", and made into its parts."""
