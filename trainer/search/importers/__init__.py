"""Importers of published datasets: questions, gold pages and page files in the project's form."""
