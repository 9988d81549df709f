//! Records of the partial file of a Parquet output: row, id and vector in a binary format.
//!
//! A record is the row as u64, the length of the id as u32 ([`NO_ID`] for none), the id, and the vector as float32, all
//! little-endian.

use std::io::{self, Read};

use crate::row::RowId;

/// Length of the id of a row without one.
const NO_ID: u32 = u32::MAX;

/// Record as read.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct VectorRecord {
    pub(super) row: u64,
    pub(super) id: Option<Vec<u8>>,
    pub(super) vector: Vec<f32>,
}

/// Appends a record.
pub(super) fn write_record(row: u64, id: Option<&RowId>, vector: &[f32], into: &mut Vec<u8>) {
    into.extend_from_slice(&row.to_le_bytes());
    match id.map(RowId::to_text) {
        Some(id) => {
            let length = u32::try_from(id.len()).expect("a row is far smaller than 4 GB");
            into.extend_from_slice(&length.to_le_bytes());
            into.extend_from_slice(id.as_bytes());
        }
        None => into.extend_from_slice(&NO_ID.to_le_bytes()),
    }
    vector.iter().for_each(|value| into.extend_from_slice(&value.to_le_bytes()));
}

/// Reads a record with a vector of `dimension` values, or `None` at the end.
pub(super) fn read_record(input: &mut impl Read, dimension: usize) -> io::Result<Option<VectorRecord>> {
    let mut row = [0; 8];
    if input.read(&mut row[..1])? == 0 {
        return Ok(None);
    }
    input.read_exact(&mut row[1..])?;
    let mut length = [0; 4];
    input.read_exact(&mut length)?;
    let id = match u32::from_le_bytes(length) {
        NO_ID => None,
        length => {
            let mut id = vec![0; length as usize];
            input.read_exact(&mut id)?;
            Some(id)
        }
    };
    let mut bytes = vec![0; dimension * 4];
    input.read_exact(&mut bytes)?;
    let (values, _) = bytes.as_chunks::<4>();
    let vector = values.iter().map(|value| f32::from_le_bytes(*value)).collect();
    Ok(Some(VectorRecord { row: u64::from_le_bytes(row), id, vector }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_back_and_an_incomplete_one_is_an_error() {
        let mut bytes = Vec::new();
        write_record(5, None, &[1.0, -0.0], &mut bytes);
        let first = bytes.len();
        write_record(u64::MAX, Some(&RowId::Text("ä".to_owned())), &[2.0, f32::MAX], &mut bytes);
        for length in 0..=bytes.len() {
            let mut input = &bytes[..length];
            let mut read = 0;
            let end = loop {
                match read_record(&mut input, 2) {
                    Ok(Some(record)) => {
                        let (row, id) = [(5, None), (u64::MAX, Some("ä".as_bytes().to_vec()))][read].clone();
                        assert_eq!((record.row, record.id), (row, id));
                        read += 1;
                    }
                    end => break end,
                }
            };
            assert_eq!(
                end.is_ok(),
                length == 0 || length == first || length == bytes.len(),
                "{length} bytes"
            );
        }
    }
}
