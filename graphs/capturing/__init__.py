"""CUDA graphs of steps: inputs at fixed addresses, the policy of what is captured, and replays."""
