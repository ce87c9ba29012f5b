"""Media: sound and images as the numbers that models take."""
