"""Steps as CUDA graphs: inputs at fixed addresses, what is captured when, and replays."""
