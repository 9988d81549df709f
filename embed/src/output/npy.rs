//! Header of NumPy's file format (version 1.0), padded to a fixed size, so that the number of rows can be written last.

/// Size of the header: room for any shape.
pub(crate) const HEADER_BYTES: usize = 128;

/// Magic number and version.
const MAGIC: &[u8] = b"\x93NUMPY\x01\x00";

/// Returns the header of a C-ordered array of little-endian float32.
pub(crate) fn header(rows: u64, dimension: usize) -> [u8; HEADER_BYTES] {
    let dictionary = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {dimension}), }}");
    let length = HEADER_BYTES - MAGIC.len() - 2;
    let mut header = Vec::with_capacity(HEADER_BYTES);
    header.extend_from_slice(MAGIC);
    header.extend_from_slice(&(length as u16).to_le_bytes());
    header.extend_from_slice(dictionary.as_bytes());
    header.resize(HEADER_BYTES - 1, b' ');
    header.push(b'\n');
    header.try_into().expect("the longest dictionary, of two 20-digit numbers, is shorter than the header")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_that_of_numpy() {
        let header = header(3, 2);
        assert_eq!(&header[..10], b"\x93NUMPY\x01\x00\x76\x00");
        let dictionary = std::str::from_utf8(&header[10..]).expect("ASCII");
        assert_eq!(dictionary.trim_end(), "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }");
        assert!(dictionary.ends_with('\n') && HEADER_BYTES.is_multiple_of(64));
    }

    #[test]
    fn the_largest_shape_has_room() {
        assert_eq!(header(u64::MAX, usize::MAX).len(), HEADER_BYTES);
    }
}
