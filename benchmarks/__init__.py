"""What the project claims about speed and memory, each figure from one command."""
