"""What communication stays exposed under TorchRec's pipelines and the fine-grained one, on two emulated hosts."""
