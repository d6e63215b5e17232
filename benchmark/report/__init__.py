"""What every measurement ends in: results, pictures, pages, and what a terminal shows meanwhile."""
