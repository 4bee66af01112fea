"""Plain PyTorch implementations of the operators: any device, any floating dtype; the oracle of the faster ones."""
