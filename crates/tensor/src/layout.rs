//! Layout of a stage's parameters in one flat buffer, so that optimizer steps, norms, shards and reductions are
//! flat loops. Each parameter starts at a multiple of 256 bytes, which are 64 f32 values. The padding between
//! parameters is zero and is not part of counts, norms, hashes and payloads.

use std::ops::Range;

use crate::{Result, Shape, Tensor, TensorError, View, ViewMut};

/// Alignment in f32 elements: 256 bytes.
const ALIGN: usize = 64;

/// One parameter of a [`ParamLayout`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    /// Name, such as `h.0.attn.c_attn.weight`.
    pub name: String,
    /// Shape of the parameter.
    pub shape: Shape,
    /// Index of the first element in the flat buffer.
    pub start: usize,
}

impl Param {
    /// Returns the range of the parameter in the flat buffer, without padding.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.shape.len()
    }
}

/// Name, shape and position of each parameter of a stage.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ParamLayout {
    params: Vec<Param>,
    len: usize,
}

impl ParamLayout {
    /// Lays out the parameters in the given order.
    #[must_use]
    pub fn new(params: impl IntoIterator<Item = (String, Shape)>) -> Self {
        let mut layout = Self::default();
        for (name, shape) in params {
            let start = layout.len;
            layout.len += shape.len().next_multiple_of(ALIGN);
            layout.params.push(Param { name, shape, start });
        }
        layout
    }

    /// Returns the length of the flat buffer in elements, padding included.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no parameters.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// Returns the number of elements of all parameters, without padding.
    #[must_use]
    pub fn count(&self) -> usize {
        self.params.iter().map(|p| p.shape.len()).sum()
    }

    /// Returns all parameters in order.
    #[must_use]
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// Returns the index of the parameter with this name.
    pub fn find(&self, name: &str) -> Result<usize> {
        self.params
            .iter()
            .position(|p| p.name == name)
            .ok_or_else(|| TensorError::UnknownParameter { name: name.to_owned() })
    }

    fn some(&self, first: usize, count: usize) -> Result<&[Param]> {
        let (end, len) = (first.saturating_add(count), self.params.len());
        self.params.get(first..end).ok_or(TensorError::OutOfBounds { op: "layout", start: first, end, len })
    }

    /// Copies the parameters out of a flat buffer, in the layout's order and without the padding. The result
    /// has [`count`](Self::count) values.
    ///
    /// Errors: [`TensorError::ShapeMismatch`] unless `flat` has [`len`](Self::len) values.
    ///
    /// ```
    /// use farflung_tensor::{ParamLayout, Shape};
    ///
    /// let shapes = [("w".to_owned(), Shape::from([1, 2])), ("b".to_owned(), Shape::from(1))];
    /// let layout = ParamLayout::new(shapes);
    /// let flat = layout.unpack(&[1.0, 2.0, 3.0])?;
    /// assert_eq!((flat.len(), flat[0], flat[1], flat[64]), (128, 1.0, 2.0, 3.0));
    /// assert_eq!(layout.pack(&flat)?, [1.0, 2.0, 3.0]);
    /// # Ok::<(), farflung_tensor::TensorError>(())
    /// ```
    pub fn pack(&self, flat: &[f32]) -> Result<Vec<f32>> {
        same_len("pack", flat.len(), self.len)?;
        let mut packed = Vec::with_capacity(self.count());
        self.params.iter().for_each(|p| packed.extend_from_slice(&flat[p.range()]));
        Ok(packed)
    }

    /// Copies packed parameters into a new flat buffer of [`len`](Self::len) values, with zeros as padding. The
    /// inverse of [`pack`](Self::pack).
    ///
    /// Errors: [`TensorError::ShapeMismatch`] unless `packed` has [`count`](Self::count) values.
    pub fn unpack(&self, packed: &[f32]) -> Result<Vec<f32>> {
        same_len("unpack", packed.len(), self.count())?;
        let mut flat = vec![0.0; self.len];
        let mut rest = packed;
        for p in &self.params {
            let (values, behind) = rest.split_at(p.shape.len());
            flat[p.range()].copy_from_slice(values);
            rest = behind;
        }
        Ok(flat)
    }

    /// Returns a view of parameter `index` of a flat buffer with this layout.
    pub fn view<'a>(&self, flat: &'a Tensor, index: usize) -> Result<View<'a>> {
        self.view_from(flat, 0, index)
    }

    /// Returns a view of parameter `index` of a buffer that has a range of a flat buffer with this layout, from
    /// element `start` on.
    ///
    /// Errors: [`TensorError::OutOfBounds`] if the parameter is not within the range.
    pub fn view_from<'a>(&self, buffer: &'a Tensor, start: usize, index: usize) -> Result<View<'a>> {
        let p = &self.some(index, 1)?[0];
        let (op, len) = ("layout", start + buffer.shape().len());
        let at = p.start.checked_sub(start);
        let at = at.ok_or(TensorError::OutOfBounds { op, start: p.start, end: p.range().end, len })?;
        buffer.view().part(at, p.shape)
    }

    /// Returns read-only views of parameters `first..first + N` of a flat buffer with this layout.
    pub fn views<'a, const N: usize>(&self, flat: &'a Tensor, first: usize) -> Result<[View<'a>; N]> {
        let mut out = [flat.view(); N];
        for (i, view) in out.iter_mut().enumerate() {
            *view = self.view(flat, first + i)?;
        }
        Ok(out)
    }

    /// Returns disjoint mutable views of parameters `first..first + N` of a flat buffer with this layout.
    pub fn views_mut<'a, const N: usize>(
        &self,
        flat: &'a mut Tensor,
        first: usize,
    ) -> Result<[ViewMut<'a>; N]> {
        if flat.shape().len() < self.len {
            return Err(TensorError::ShapeMismatch {
                op: "layout",
                lhs: flat.shape(),
                rhs: Shape::from(self.len),
            });
        }
        self.views_mut_from(flat, 0, first)
    }

    /// Returns disjoint mutable views of parameters `first..first + N` of a buffer that has a range of a flat
    /// buffer with this layout, from element `start` on.
    ///
    /// Errors: [`TensorError::OutOfBounds`] if the parameters are not within the range.
    pub fn views_mut_from<'a, const N: usize>(
        &self,
        buffer: &'a mut Tensor,
        start: usize,
        first: usize,
    ) -> Result<[ViewMut<'a>; N]> {
        let params = self.some(first, N)?;
        if let [first, .., last] | [first @ last] = params
            && (first.start < start || last.range().end > start + buffer.shape().len())
        {
            let (op, len) = ("layout", start + buffer.shape().len());
            return Err(TensorError::OutOfBounds { op, start: first.start, end: last.range().end, len });
        }
        let mut rest = Some(buffer.view_mut());
        let mut at = start;
        Ok(std::array::from_fn(|i| {
            let p = &params[i];
            let view = rest.take().expect("each turn puts the rest back");
            let fits = "the buffer has the parameters";
            let (_, tail) = view.split_at(p.start - at).expect(fits);
            let (view, tail) = tail.split_at(p.shape.len()).expect(fits);
            at = p.start + p.shape.len();
            rest = Some(tail);
            view.reshape(p.shape).expect("the view has this shape's length")
        }))
    }
}

fn same_len(op: &'static str, found: usize, expected: usize) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(TensorError::ShapeMismatch { op, lhs: Shape::from(found), rhs: Shape::from(expected) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn starts_are_aligned_and_views_are_disjoint() {
        let names = [("a", vec![3, 5]), ("b", vec![64]), ("c", vec![65]), ("d", vec![])];
        let layout = ParamLayout::new(names.map(|(n, d)| (n.to_owned(), Shape::new(&d).unwrap())));
        assert_eq!(layout.params().iter().map(|p| p.start).collect::<Vec<_>>(), [0, 64, 128, 256]);
        assert_eq!((layout.len(), layout.count()), (320, 15 + 64 + 65 + 1));
        let mut flat = Device::cpu(1).unwrap().zeros(layout.len()).unwrap();
        let [mut b, mut c] = layout.views_mut(&mut flat, 1).unwrap();
        b.write(&[1.0_f32; 64]).unwrap();
        c.write(&[2.0_f32; 65]).unwrap();
        let all = flat.to_vec::<f32>().unwrap();
        assert!((all.iter().sum::<f32>() - 194.0).abs() < 1e-6);
        assert_eq!(layout.view(&flat, 2).unwrap().to_vec::<f32>().unwrap(), [2.0; 65]);
        assert!(layout.find("e").unwrap_err().to_string().contains("`e`"));
        let mut short = flat.device().zeros(100).unwrap();
        assert!(layout.views_mut::<1>(&mut short, 0).is_err());
        assert!(layout.views_mut::<2>(&mut flat, 3).is_err());
        assert!(layout.views::<2>(&flat, 3).is_err() && layout.view(&flat, 4).is_err());
    }

    #[test]
    fn packing_leaves_the_padding_out_and_unpacking_makes_it_zero() {
        let shapes = [("a", vec![3, 5]), ("none", vec![0, 7]), ("b", vec![64]), ("c", vec![])];
        let layout = ParamLayout::new(shapes.map(|(n, d)| (n.to_owned(), Shape::new(&d).unwrap())));
        assert_eq!((layout.len(), layout.count()), (192, 80));
        let flat: Vec<f32> = (0..192).map(|i| i as f32).collect();
        let packed = layout.pack(&flat).unwrap();
        let expected: Vec<f32> = (0..15).chain(64..129).map(|i| i as f32).collect();
        assert_eq!(packed, expected);
        let back = layout.unpack(&packed).unwrap();
        for (i, (a, b)) in flat.iter().zip(&back).enumerate() {
            let padding = (15..64).contains(&i) || i > 128;
            assert!((if padding { 0.0 } else { *a }).to_bits() == b.to_bits(), "{i}: {a} {b}");
        }
        assert_eq!(layout.pack(&back).unwrap(), packed);
        for wrong in [0, 80, 191, 193] {
            let error = layout.pack(&vec![0.0; wrong]).unwrap_err().to_string();
            assert_eq!(error, format!("pack: shapes [{wrong}] and [192] do not match"));
        }
        for wrong in [0, 79, 81, 192] {
            let error = layout.unpack(&vec![0.0; wrong]).unwrap_err().to_string();
            assert_eq!(error, format!("unpack: shapes [{wrong}] and [80] do not match"));
        }
        let empty = ParamLayout::default();
        assert!(empty.pack(&[]).unwrap().is_empty() && empty.unpack(&[]).unwrap().is_empty());
    }
}
