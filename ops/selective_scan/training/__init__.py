"""The selective scan without pools, which a backward goes through."""
