//! Shapes of at most four dimensions, row-major.

use std::fmt;

use crate::{Result, TensorError};

/// Maximum number of dimensions.
const MOST: usize = 4;

/// The dimensions of a tensor, outermost first. Up to four are stored inline, so a shape is `Copy`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; MOST],
    rank: u8,
}

impl Shape {
    /// Creates a shape; empty `dims` is a scalar. `Shape::from([2, 3])` takes an array and checks the number of
    /// dimensions at compile time.
    ///
    /// Errors: [`TensorError::Dimensions`] if there are more than four dimensions.
    ///
    /// ```
    /// use farflung_tensor::Shape;
    ///
    /// assert_eq!(Shape::new(&[2, 3])?, Shape::from([2, 3]));
    /// let error = Shape::new(&[1, 2, 3, 4, 5]).unwrap_err();
    /// assert_eq!(error.to_string(), "the shape has 5 dimensions, expected at most 4");
    /// # Ok::<(), farflung_tensor::TensorError>(())
    /// ```
    pub fn new(dims: &[usize]) -> Result<Self> {
        let mut all = [1; MOST];
        let found = TensorError::Dimensions { count: dims.len(), most: MOST };
        all.get_mut(..dims.len()).ok_or(found)?.copy_from_slice(dims);
        Ok(Self { dims: all, rank: dims.len() as u8 })
    }

    /// Returns the dimensions, outermost first.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        &self.dims[..usize::from(self.rank)]
    }

    /// Returns the number of elements, or [`usize::MAX`] on overflow. No device can allocate that many.
    #[must_use]
    pub fn len(&self) -> usize {
        product(self.dims())
    }

    /// Returns whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the last dimension, or 1 for a scalar.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.dims().last().copied().unwrap_or(1)
    }

    /// Returns the product of all dimensions but the last: the number of rows of the tensor as a `rows` by
    /// `cols` matrix.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.dims().split_last().map_or(1, |(_, rest)| product(rest))
    }
}

fn product(dims: &[usize]) -> usize {
    if dims.contains(&0) { 0 } else { dims.iter().fold(1, |n, &d| n.saturating_mul(d)) }
}

impl From<usize> for Shape {
    fn from(len: usize) -> Self {
        Self::from([len])
    }
}

/// Compilation fails for an array of more than four dimensions:
///
/// ```compile_fail
/// let shape = farflung_tensor::Shape::from([1, 2, 3, 4, 5]);
/// ```
impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        const { assert!(N <= MOST, "a shape has at most four dimensions") };
        let mut all = [1; MOST];
        all[..N].copy_from_slice(&dims);
        Self { dims: all, rank: N as u8 }
    }
}

impl TryFrom<&[usize]> for Shape {
    type Error = TensorError;

    fn try_from(dims: &[usize]) -> Result<Self> {
        Self::new(dims)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts() {
        let s = Shape::from([2, 3, 4]);
        assert_eq!((s.len(), s.rows(), s.cols()), (24, 6, 4));
        assert_eq!(Shape::new(&[]).unwrap().len(), 1);
        assert_eq!(s.to_string(), "[2, 3, 4]");
        assert!(Shape::from([3, 0]).is_empty());
        assert_eq!(Shape::from([1 << 63, 2]).len(), usize::MAX);
        assert!(Shape::from([1 << 63, 2, 0]).is_empty());
    }

    #[test]
    fn more_than_four_dimensions_are_an_error() {
        assert_eq!(Shape::new(&[2, 3, 4, 5]).unwrap(), Shape::from([2, 3, 4, 5]));
        for count in [5, 6, 1000] {
            let found = Shape::try_from(&vec![1; count][..]);
            assert_eq!(found, Err(TensorError::Dimensions { count, most: 4 }));
        }
    }
}
