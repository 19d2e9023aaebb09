"""The rules that find a verdict, by family. Pure: an incident goes in, a verdict or None comes out."""
