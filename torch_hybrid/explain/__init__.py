"""What a model becomes, shown: tables of facts, and timelines of its steps."""
