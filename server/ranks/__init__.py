"""What ranks have in common: how they meet, what they sum and exchange, and the steps that rank 0 passes on."""
