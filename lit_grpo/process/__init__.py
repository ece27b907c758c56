"""This process and its machine: how threads wait, and how a file is replaced as a whole."""
