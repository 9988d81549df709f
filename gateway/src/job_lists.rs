//! Pages of lists of jobs, files and batches: as a region renders one, and as a gateway merges those of several regions.
//!
//! A page ends at the number of rows that the client requests, or earlier at [`LIST_BYTES_MAX`]; `has_more` says that there are
//! further rows in either case, so clients read page after page as usual.

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

/// Longest page of a region, bytes. A gateway holds one of each region in memory.
pub(crate) const LIST_BYTES_MAX: usize = 4 << 20;

/// Text before and after the rows of a page.
const BEGIN: &str = r#"{"object":"list","data":["#;
const END: [&str; 2] = [r#"],"has_more":false}"#, r#"],"has_more":true}"#];

/// Renders a page: the first `limit` rows, and fewer if they have more than [`LIST_BYTES_MAX`] bytes together.
pub(crate) fn page(rows: impl Iterator<Item = Value>, limit: usize) -> String {
    let (mut text, mut count, mut has_more) = (BEGIN.to_owned(), 0, false);
    for row in rows {
        let row = row.to_string();
        let bytes = text.len() + usize::from(count > 0) + row.len() + END[0].len();
        // A row is less than a tenth of the limit: its texts are limited where they are accepted.
        if count == limit || (count > 0 && bytes > LIST_BYTES_MAX) {
            has_more = true;
            break;
        }
        if count > 0 {
            text.push(',');
        }
        text.push_str(&row);
        count += 1;
    }
    text.push_str(END[usize::from(has_more)]);
    text
}

/// Pages of several regions, merged as they arrive: the newest rows, and whether there are more. A row stays text, of which only
/// the identifier is read: ten thousand rows as values would need several times the memory.
#[derive(Debug, Default)]
pub(crate) struct MergedList {
    /// Rows with their identifiers, the newest first.
    rows: Vec<ListRow>,
    has_more: bool,
    /// Newest last row of the regions with further rows. Those come before all older rows, which are on the next page.
    complete_from: Option<String>,
}

#[derive(Debug)]
struct ListRow {
    id: String,
    text: Box<str>,
}

/// Page of one region, as it is read.
#[derive(Deserialize)]
struct RegionPage<'a> {
    #[serde(borrow)]
    data: Vec<&'a RawValue>,
    #[serde(default)]
    has_more: bool,
}

#[derive(Deserialize)]
struct ListRowId {
    id: String,
}

impl MergedList {
    /// Adds the page of a region, and keeps at most `limit` rows. Returns false if it is not a list.
    pub(crate) fn add(&mut self, page: &[u8], limit: usize) -> bool {
        let Ok(RegionPage { data, has_more }) = serde_json::from_slice(page) else { return false };
        let row = |row: &RawValue| {
            let ListRowId { id } = serde_json::from_str(row.get()).ok()?;
            Some(ListRow { id, text: row.get().into() })
        };
        let Some(rows) = data.into_iter().map(row).collect::<Option<Vec<_>>>() else { return false };
        if let Some(last) = rows.last().filter(|_| has_more) {
            self.complete_from = self.complete_from.take().max(Some(last.id.clone()));
        }
        self.rows.extend(rows);
        if let Some(oldest) = &self.complete_from {
            self.rows.retain(|row| row.id >= *oldest);
        }
        // Identifiers sort by the time of the submission.
        self.rows.sort_by(|a, b| b.id.cmp(&a.id));
        self.has_more |= has_more || self.rows.len() > limit;
        self.rows.truncate(limit);
        true
    }

    /// Returns the memory of the rows, bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.rows.iter().map(|row| size_of::<ListRow>() + row.id.len() + row.text.len()).sum()
    }

    /// Returns the identifiers of the newest and of the oldest row.
    pub(crate) fn ends(&self) -> Option<(&str, &str)> {
        Some((&self.rows.first()?.id, &self.rows.last()?.id))
    }

    /// Renders the list with further members.
    pub(crate) fn render(&self, further: &Map<String, Value>) -> String {
        let mut text = String::with_capacity(self.bytes());
        text.push_str(BEGIN);
        for (index, row) in self.rows.iter().enumerate() {
            if index > 0 {
                text.push(',');
            }
            text.push_str(&row.text);
        }
        let end = END[usize::from(self.has_more)];
        text.push_str(&end[..end.len() - 1]);
        for (name, value) in further {
            text.push(',');
            text.push_str(&json!(name).to_string());
            text.push(':');
            text.push_str(&value.to_string());
        }
        text.push('}');
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(number: usize, bytes: usize) -> Value {
        json!({"id": format!("file-{number:04}"), "filename": "x".repeat(bytes)})
    }

    fn read(text: &str) -> (Vec<Value>, bool) {
        let page: Value = serde_json::from_str(text).expect("a list");
        (page["data"].as_array().expect("rows").clone(), page["has_more"] == true)
    }

    #[test]
    fn a_page_ends_at_its_number_of_rows_and_at_its_bytes() {
        let numbers = |limit| read(&page((0..3).map(|number| row(number, 10)), limit));
        assert_eq!(numbers(3), ((0..3).map(|number| row(number, 10)).collect(), false));
        assert_eq!(numbers(2), ((0..2).map(|number| row(number, 10)).collect(), true));
        assert_eq!(read(&page(std::iter::empty(), 2)), (Vec::new(), false));

        // Two rows that fill the page to the byte, and one byte more.
        let overhead = page([row(0, 0), row(1, 0)].into_iter(), 10).len();
        for (more, rows) in [(0, 2), (1, 1)] {
            let sizes = [1 << 20, LIST_BYTES_MAX - overhead - (1 << 20) + more];
            let text = page(sizes.into_iter().enumerate().map(|(number, bytes)| row(number, bytes)), 10);
            assert!(text.len() <= LIST_BYTES_MAX, "{}", text.len());
            assert_eq!(text.len() == LIST_BYTES_MAX, more == 0);
            let (read, has_more) = read(&text);
            assert_eq!((read.len(), has_more), (rows, rows < 2));
        }
    }

    #[test]
    fn every_row_is_on_one_page_however_the_regions_cut_theirs() {
        // Three regions with every third row each, of which one cuts its pages after two rows and another after five.
        let cuts = [2, 5, 100];
        for limit in [1, 3, 7, 100] {
            let (mut seen, mut after) = (Vec::new(), "file-9999".to_owned());
            loop {
                let mut list = MergedList::default();
                for (region, cut) in cuts.into_iter().enumerate() {
                    let rows =
                        (0..50).rev().filter(|number| number % 3 == region).map(|number| row(number, 1));
                    let rows = rows.filter(|row| row["id"].as_str() < Some(after.as_str()));
                    assert!(list.add(page(rows, limit.min(cut)).as_bytes(), limit));
                }
                let (rows, has_more) = read(&list.render(&Map::new()));
                assert!(rows.len() <= limit && !(rows.is_empty() && has_more));
                let ends = list.ends().map(|(first, last)| [json!(first), json!(last)]);
                assert_eq!(
                    ends,
                    rows.first()
                        .zip(rows.last())
                        .map(|(first, last)| [first["id"].clone(), last["id"].clone()])
                );
                seen.extend(rows.iter().map(|row| row["id"].as_str().expect("an id").to_owned()));
                let Some(last) = seen.last().filter(|_| has_more) else { break };
                after.clone_from(last);
            }
            let expected: Vec<_> = (0..50).rev().map(|number| format!("file-{number:04}")).collect();
            assert_eq!(seen, expected, "{limit}");
        }
    }

    #[test]
    fn rows_keep_their_text_and_the_list_has_further_members() {
        let mut list = MergedList::default();
        for wrong in ["", "{}", r#"{"data":[1]}"#, r#"{"data":[{"id":7}],"has_more":false}"#] {
            assert!(!list.add(wrong.as_bytes(), 10), "{wrong}");
        }
        assert_eq!((list.bytes(), list.ends()), (0, None));
        assert!(list.add(br#"{"data":[{"id":"b","x":1.0},{"id":"a"}],"has_more":true}"#, 10));
        assert!(list.add(br#"{"data":[{"id":"a0","x":"\u00e9"}],"has_more":false}"#, 10));
        let further = json!({"first_id": "b"});
        let text = list.render(further.as_object().expect("an object"));
        assert_eq!(
            text,
            r#"{"object":"list","data":[{"id":"b","x":1.0},{"id":"a0","x":"\u00e9"},{"id":"a"}],"has_more":true,"first_id":"b"}"#
        );
    }
}
