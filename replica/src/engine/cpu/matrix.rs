//! Matrices, and windows on them that different threads may write concurrently.
//!
//! A batch is computed by partitioning each result and assigning every part to one thread. A part of a matrix is in
//! general a rectangle, and the rows of two adjacent rectangles alternate in memory, so a slice cannot represent one.
//! [`Tiles`] is the partition: it borrows the whole matrix mutably and returns [`Window`]s that never overlap, each one
//! at most once ([`Parts`]). With that, all code above is safe: the borrow checker separates readers and writers of
//! whole matrices, and the partition separates the writers of one matrix.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

/// Bytes of a cache line, to which rows of common widths are aligned.
const LINE_BYTES: usize = 64;

/// Row-major matrix. Its memory only grows.
#[derive(Debug, Default)]
pub(super) struct Matrix {
    data: Vec<f32>,
    /// First number that is aligned to a cache line.
    start: usize,
    rows: usize,
    width: usize,
}

impl Matrix {
    /// Resizes the matrix. Its content is lost.
    pub(super) fn resize(&mut self, rows: usize, width: usize) {
        let needed = rows * width + LINE_BYTES / size_of::<f32>();
        if self.data.len() < needed {
            self.data = vec![0.0; needed];
            self.start = self.data.as_ptr().align_offset(LINE_BYTES);
        }
        (self.rows, self.width) = (rows, width);
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Returns all numbers.
    pub(super) fn data(&self) -> &[f32] {
        &self.data[self.start..][..self.rows * self.width]
    }

    /// Returns all numbers, mutably.
    pub(super) fn data_mut(&mut self) -> &mut [f32] {
        &mut self.data[self.start..][..self.rows * self.width]
    }

    /// Returns a read-only view of some rows.
    pub(super) fn view(&self, rows: Range<usize>) -> MatrixView<'_> {
        MatrixView::new(&self.data()[rows.start * self.width..rows.end * self.width], self.width)
    }

    /// Returns a window on the whole matrix, for writing by one thread.
    pub(super) fn window(&mut self) -> Window<'_> {
        let (rows, width) = (self.rows, self.width);
        Window::new(self.data_mut(), rows, width)
    }

    /// Returns a window on the whole matrix, whose rows are numbered from `first` on.
    pub(super) fn window_from(&mut self, first: usize) -> Window<'_> {
        let window = self.window();
        Window { rows: first..first + window.rows.len(), ..window }
    }

    /// Returns a partition, for writing by several threads.
    pub(super) fn tiles<'a>(&'a mut self, rows: Partition<'a>, columns: Partition<'a>) -> Tiles<'a> {
        let width = self.width;
        Tiles::new(self.data_mut(), width, rows, columns)
    }
}

/// Read-only view of rows, or of some of their columns.
#[derive(Clone, Copy)]
pub(super) struct MatrixView<'a> {
    data: &'a [f32],
    stride: usize,
    first_column: usize,
    width: usize,
}

impl<'a> MatrixView<'a> {
    fn new(data: &'a [f32], width: usize) -> MatrixView<'a> {
        MatrixView { data, stride: width, first_column: 0, width }
    }

    /// Returns a view of the same rows with these columns.
    pub(super) fn columns(self, columns: Range<usize>) -> MatrixView<'a> {
        assert!(columns.end <= self.width, "columns of the view");
        MatrixView { first_column: self.first_column + columns.start, width: columns.len(), ..self }
    }

    pub(super) fn rows(&self) -> usize {
        self.data.len() / self.stride
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Returns the existing ones of these rows as one slice, if the view has whole rows.
    #[inline(always)]
    pub(super) fn memory(&self, rows: Range<usize>) -> &'a [f32] {
        if self.width < self.stride {
            return &[];
        }
        let end = |row: usize| (row * self.stride).min(self.data.len());
        &self.data[end(rows.start)..end(rows.end)]
    }

    /// Returns the slice from the first to the last number of these rows, of which there is at least one, and the row
    /// stride.
    #[inline(always)]
    pub(super) fn span(&self, rows: Range<usize>) -> (&'a [f32], usize) {
        let first = rows.start * self.stride + self.first_column;
        (&self.data[first..][..(rows.len() - 1) * self.stride + self.width], self.stride)
    }

    #[inline(always)]
    pub(super) fn row(&self, index: usize) -> &'a [f32] {
        &self.data[index * self.stride + self.first_column..][..self.width]
    }
}

/// Rectangle of a matrix, for writing: its holder has exclusive access.
pub(super) struct Window<'a> {
    /// Corner with the lowest row and column.
    corner: NonNull<f32>,
    stride: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    matrix: PhantomData<&'a mut [f32]>,
}

// SAFETY: a window is a mutable borrow of its numbers, like a `&mut [f32]`, and those are `Send`.
unsafe impl Send for Window<'_> {}

impl<'a> Window<'a> {
    fn new(data: &'a mut [f32], rows: usize, width: usize) -> Window<'a> {
        assert!(rows * width <= data.len(), "a window lies in its matrix");
        Window {
            corner: NonNull::from(data).cast(),
            stride: width,
            rows: 0..rows,
            columns: 0..width,
            matrix: PhantomData,
        }
    }

    /// Reborrows the window.
    pub(super) fn reborrow(&mut self) -> Window<'_> {
        let Window { corner, stride, ref rows, ref columns, matrix: _ } = *self;
        Window { corner, stride, rows: rows.clone(), columns: columns.clone(), matrix: PhantomData }
    }

    /// Returns the rows of the matrix.
    pub(super) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Returns the columns of the matrix.
    pub(super) fn columns(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// Returns a row of the window, by its index in the window.
    #[inline(always)]
    pub(super) fn row_mut(&mut self, index: usize) -> &mut [f32] {
        assert!(index < self.rows.len(), "a row of the window");
        // SAFETY: the rectangle lies in the matrix, which its constructors ensure, and the index in the rectangle; the
        // window has exclusive access to the rectangle, and this borrow ends before the next one begins.
        unsafe {
            let first = self.corner.as_ptr().add(index * self.stride);
            std::slice::from_raw_parts_mut(first, self.columns.len())
        }
    }

    /// Returns a read-only view, if the window has whole rows.
    pub(super) fn view(&self) -> MatrixView<'_> {
        assert!(self.columns.len() == self.stride, "a view is of whole rows");
        // SAFETY: whole rows are contiguous memory inside the matrix; the window has exclusive access to it, and the
        // view borrows the window.
        let data = unsafe { std::slice::from_raw_parts(self.corner.as_ptr(), self.rows.len() * self.stride) };
        MatrixView::new(data, self.stride)
    }
}

/// Partition of rows or columns into consecutive ranges.
#[derive(Clone, Copy)]
pub(super) enum Partition<'a> {
    /// `total` elements in `parts` of nearly equal size, each but the last a multiple of `unit`.
    Even { total: usize, parts: usize, unit: usize },
    /// Ranges between consecutive offsets.
    At(&'a [u32]),
}

impl Partition<'_> {
    /// Returns a single range.
    pub(super) fn whole(total: usize) -> Partition<'static> {
        Partition::even(total, 1, total.max(1))
    }

    /// Returns at most `parts` ranges, of whole units.
    pub(super) fn even(total: usize, parts: usize, unit: usize) -> Partition<'static> {
        let parts = parts.clamp(1, total.div_ceil(unit).max(1));
        Partition::Even { total, parts, unit }
    }

    fn len(&self) -> usize {
        match self {
            Partition::Even { parts, .. } => *parts,
            Partition::At(ends) => ends.len() - 1,
        }
    }

    fn range(&self, index: usize) -> Range<usize> {
        match *self {
            Partition::Even { total, parts, unit } => {
                let units = total.div_ceil(unit);
                let end = |index: usize| (index * units / parts * unit).min(total);
                end(index)..end(index + 1)
            }
            Partition::At(ends) => ends[index] as usize..ends[index + 1] as usize,
        }
    }

    /// Returns the end of the last range, and checks that the ranges do not overlap.
    fn checked_end(&self) -> usize {
        match self {
            Partition::Even { total, .. } => *total,
            Partition::At(ends) => {
                assert!(ends.is_sorted(), "offsets are sorted");
                ends.last().map_or(0, |end| *end as usize)
            }
        }
    }
}

/// Work in parts that no two threads share.
///
/// # Safety
/// Parts with different indices have no memory in common that either could write.
pub(super) unsafe trait Parts: Sync {
    /// Part for one thread.
    type Part;

    /// Returns the number of parts.
    fn len(&self) -> usize;

    /// Returns one part.
    ///
    /// # Safety
    /// Each index is below [`Parts::len`] and passed at most once.
    unsafe fn part(&self, index: usize) -> Self::Part;
}

/// Matrix partitioned into windows.
pub(super) struct Tiles<'a> {
    first: NonNull<f32>,
    stride: usize,
    rows: Partition<'a>,
    columns: Partition<'a>,
    matrix: PhantomData<&'a mut [f32]>,
}

// SAFETY: threads can only take windows from a shared `Tiles`, and windows are `Send`.
unsafe impl Sync for Tiles<'_> {}

impl<'a> Tiles<'a> {
    /// Partitions `data`, rows of `width` numbers.
    pub(super) fn new(
        data: &'a mut [f32],
        width: usize,
        rows: Partition<'a>,
        columns: Partition<'a>,
    ) -> Tiles<'a> {
        assert!(columns.checked_end() <= width, "the columns lie in the matrix");
        assert!(rows.checked_end() * width <= data.len(), "the rows lie in the matrix");
        Tiles { first: NonNull::from(data).cast(), stride: width, rows, columns, matrix: PhantomData }
    }

    /// Calls `work` on one window after the other.
    pub(super) fn one_by_one(self, mut work: impl FnMut(Window<'a>)) {
        for index in 0..self.len() {
            // SAFETY: each index once, and these tiles have no other user.
            work(unsafe { self.part(index) });
        }
    }
}

// SAFETY: windows with different indices differ in their row range or in their column range; `Tiles::new` has checked
// that neither the row ranges nor the column ranges overlap.
unsafe impl<'a> Parts for Tiles<'a> {
    type Part = Window<'a>;

    fn len(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    unsafe fn part(&self, index: usize) -> Window<'a> {
        let rows = self.rows.range(index / self.columns.len());
        let columns = self.columns.range(index % self.columns.len());
        // SAFETY: the ranges end inside the matrix, as `Tiles::new` has checked, and so does the sum.
        let corner = unsafe { self.first.add(rows.start * self.stride + columns.start) };
        Window { corner, stride: self.stride, rows, columns, matrix: PhantomData }
    }
}

/// Pairs of parts of two matrices.
// SAFETY: parts with different indices have different indices in both.
unsafe impl<A: Parts, B: Parts> Parts for (A, B) {
    type Part = (A::Part, B::Part);

    fn len(&self) -> usize {
        assert!(self.0.len() == self.1.len(), "pairs of parts");
        self.0.len()
    }

    unsafe fn part(&self, index: usize) -> Self::Part {
        // SAFETY: guaranteed by the caller, for both.
        unsafe { (self.0.part(index), self.1.part(index)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes the number of each part over all of it, and returns the matrix.
    fn paint(rows: usize, width: usize, row_cut: Partition<'_>, column_cut: Partition<'_>) -> Vec<f32> {
        let mut matrix = Matrix::default();
        matrix.resize(rows, width);
        matrix.data_mut().fill(f32::NAN);
        let tiles = matrix.tiles(row_cut, column_cut);
        // SAFETY: each index once.
        let mut windows: Vec<Window<'_>> =
            (0..tiles.len()).map(|index| unsafe { tiles.part(index) }).collect();
        for (number, window) in windows.iter_mut().enumerate() {
            for row in 0..window.rows().len() {
                window.row_mut(row).fill(number as f32);
            }
        }
        matrix.data().to_vec()
    }

    #[test]
    fn windows_cover_a_matrix_and_do_not_overlap() {
        let painted = paint(3, 5, Partition::At(&[0, 1, 1, 3]), Partition::even(5, 2, 2));
        let expected = [[0., 0., 1., 1., 1.], [4., 4., 5., 5., 5.], [4., 4., 5., 5., 5.]];
        assert_eq!(painted, expected.as_flattened());
    }

    #[test]
    fn parts_are_of_nearly_equal_size_and_whole_units() {
        let check = |total, parts, unit, expected: &[Range<usize>]| {
            let cut = Partition::even(total, parts, unit);
            let ranges: Vec<Range<usize>> = (0..cut.len()).map(|index| cut.range(index)).collect();
            assert_eq!(ranges, expected, "{total} in {parts} parts of units of {unit}");
        };
        check(10, 3, 1, &[0..3, 3..6, 6..10]);
        check(70, 2, 32, &[0..32, 32..70]);
        check(70, 9, 32, &[0..32, 32..64, 64..70]);
        check(3, 4, 1, &[0..1, 1..2, 2..3]);
        check(0, 4, 1, std::slice::from_ref(&(0..0)));
    }

    #[test]
    #[should_panic(expected = "the rows lie in the matrix")]
    fn a_partition_beyond_the_matrix_panics() {
        paint(3, 5, Partition::At(&[0, 4]), Partition::whole(5));
    }

    #[test]
    #[should_panic(expected = "offsets are sorted")]
    fn a_partition_with_overlapping_ranges_panics() {
        paint(3, 5, Partition::At(&[0, 2, 1, 3]), Partition::whole(5));
    }

    #[test]
    fn rows_are_aligned_to_cache_lines() {
        let mut matrix = Matrix::default();
        for rows in [1, 7, 3, 100] {
            matrix.resize(rows, 32);
            assert_eq!(matrix.window().row_mut(rows - 1).as_ptr().align_offset(LINE_BYTES), 0);
        }
    }
}
