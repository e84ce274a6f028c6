"""The mechanism of ops: registration, capabilities, plans and checks that all families share."""
