"""From a traced step to one that runs: layers copied, cut into regions, each compiled once."""
