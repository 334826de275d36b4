"""LSTM, GRU and plain RNN: layers, steps, cells, and their rules."""
