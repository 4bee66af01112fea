"""What an accelerator is here: which device a process uses and how processes talk."""
