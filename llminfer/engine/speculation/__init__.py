"""What drafts tokens, and for which models drafts are exact."""
