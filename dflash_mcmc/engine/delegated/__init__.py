"""What engines have in common whose weights another package or program loads."""
