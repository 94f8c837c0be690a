//! Shapes of at most four dimensions, row-major.

use std::fmt;

/// The dimensions of a tensor, outermost first. Copied freely; never on the heap.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; 4],
    rank: u8,
}

impl Shape {
    /// A shape of the given dimensions.
    ///
    /// # Panics
    /// With more than four dimensions.
    #[must_use]
    pub fn new(dims: &[usize]) -> Self {
        assert!(dims.len() <= 4, "shape of {} dimensions", dims.len());
        let mut all = [1; 4];
        all[..dims.len()].copy_from_slice(dims);
        Self { dims: all, rank: dims.len() as u8 }
    }

    /// The dimensions.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        &self.dims[..usize::from(self.rank)]
    }

    /// Number of elements; [`usize::MAX`] where it would overflow, which no device has room for.
    #[must_use]
    pub fn len(&self) -> usize {
        product(self.dims())
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The last dimension; 1 for a scalar.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.dims().last().copied().unwrap_or(1)
    }

    /// All dimensions but the last, multiplied: the shape seen as a matrix of `rows` by `cols`.
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
        Self::new(&[len])
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Self::new(&dims)
    }
}

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Self {
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
        assert_eq!(Shape::new(&[]).len(), 1);
        assert_eq!(s.to_string(), "[2, 3, 4]");
        assert!(Shape::from([3, 0]).is_empty());
        assert_eq!(Shape::from([1 << 63, 2]).len(), usize::MAX);
        assert!(Shape::from([1 << 63, 2, 0]).is_empty());
    }
}
