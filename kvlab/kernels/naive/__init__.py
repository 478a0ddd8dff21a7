"""What each kernel computes, in plain torch: the references that the kernels are tested against."""
