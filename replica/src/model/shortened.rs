//! Names, texts and shapes of a checkpoint in messages, with a bounded length: a message that is cut must keep its cause.

/// Maximum bytes of a name, such as that of a tensor or a token.
const NAME_BYTES_MAX: usize = 80;
/// Maximum bytes of the text of a parser, which may quote the file.
const TEXT_BYTES_MAX: usize = 240;
/// Maximum number of dimensions of a shape. Weights have two at most.
const DIMENSIONS_MAX: usize = 4;

/// Returns a name without control characters; the middle of a long one is omitted.
pub(crate) fn shortened_name(name: &str) -> String {
    shortened(name, NAME_BYTES_MAX)
}

/// Returns the text of a parser without control characters; the middle of a long one is omitted.
pub(crate) fn shortened_text(text: &str) -> String {
    shortened(text, TEXT_BYTES_MAX)
}

/// Returns a shape; of one with many dimensions, the first ones and their number.
pub(crate) fn shortened_shape(shape: &[usize]) -> String {
    match shape.get(..DIMENSIONS_MAX) {
        Some(first) if shape.len() > DIMENSIONS_MAX => {
            let first: Vec<String> = first.iter().map(usize::to_string).collect();
            format!("[{}, …] ({} dimensions)", first.join(", "), shape.len())
        }
        Some(_) | None => format!("{shape:?}"),
    }
}

fn shortened(text: &str, bytes_max: usize) -> String {
    let printable = |text: &str| text.replace(char::is_control, " ");
    if text.len() <= bytes_max {
        return printable(text);
    }
    let half = bytes_max / 2;
    let (start, end) = (text.floor_char_boundary(half), text.ceil_char_boundary(text.len() - half));
    format!("{}…{}", printable(&text[..start]), printable(&text[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_keeps_its_start_and_its_end() {
        assert_eq!(shortened_name("encoder.layer.0"), "encoder.layer.0");
        let longest = "n".repeat(NAME_BYTES_MAX);
        assert_eq!(shortened_name(&longest), longest);
        let name = shortened_name(&format!("start{}end", "n".repeat(NAME_BYTES_MAX)));
        assert!(name.starts_with("start") && name.contains('…') && name.ends_with("end"), "{name}");
        assert!(name.len() <= NAME_BYTES_MAX + '…'.len_utf8(), "{name}");
        let wide = shortened_name(&"é\u{1b}".repeat(NAME_BYTES_MAX));
        assert!(wide.len() <= NAME_BYTES_MAX + '…'.len_utf8() && !wide.contains(char::is_control), "{wide}");
    }

    #[test]
    fn a_shape_of_many_dimensions_has_their_number() {
        assert_eq!(shortened_shape(&[2, 3]), "[2, 3]");
        assert_eq!(shortened_shape(&[1; DIMENSIONS_MAX]), "[1, 1, 1, 1]");
        assert_eq!(shortened_shape(&[0; 100_000]), "[0, 0, 0, 0, …] (100000 dimensions)");
    }
}
