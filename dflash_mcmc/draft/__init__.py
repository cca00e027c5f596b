"""What proposes tokens: each option makes a drafter of `engine/drafter.py`."""
