"""What a hostile or unlucky environment hands to outlive: inputs, files, frames, states."""
