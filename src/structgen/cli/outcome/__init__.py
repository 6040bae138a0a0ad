"""What a command says of its runs: tables and JSON, their costs, their traces."""
