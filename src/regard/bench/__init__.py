"""What is measured and tested: the table of cases."""
