//! Op tables on disk: a Parquet file held column by column.
//!
//! Tables follow the aiconfigurator layout: one row per measured cell, key columns (text and
//! integers) and a `latency` column (milliseconds, except where the table says otherwise).

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use parquet::basic::{
    Compression, ConvertedType, Encoding, LogicalType, Repetition, Type as PhysicalType, ZstdLevel,
};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType, DataType, DoubleType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::{ColumnDescriptor, ColumnPath, Type as SchemaType};

use crate::timing::{Column, Columns, InputError, OpTable};

/// The largest known table has 0.3 million rows; a file that declares more than this is corrupt or
/// hostile, and is refused before memory is set aside for it.
const ROWS_MAX: usize = 8_000_000;

/// The largest known table is 4 MB; this bounds what a declared size can make us allocate.
const BYTES_MAX: u64 = 512 << 20;

/// Longest latency that is taken for one.
const LATENCY_MAX: f64 = 86_400_000.0;

/// Rows decoded at a time: small enough that the raw text values stay in the cache.
const BATCH_ROWS: usize = 4096;

const HELP_REIMPORT: &str =
    "restore the file from git or import it again with `stepgate tables import`";

impl OpTable {
    /// Reads a Parquet file: INT64 and INT32 as integers, DOUBLE and FLOAT as floats, BYTE_ARRAY as
    /// UTF-8 text. Columns are decoded when they are first looked at, `latency` at once. Other
    /// columns, those with a null and those that cannot be decoded are [`Column::Unusable`].
    ///
    /// # Errors
    /// The file cannot be read or is not Parquet throughout; a `latency` is null, not a number,
    /// infinite, negative or zero.
    pub fn read(file: &Path) -> Result<OpTable, InputError> {
        let opened = File::open(file).map_err(|e| {
            InputError::new(
                file,
                format!("cannot open the table: {e}"),
                "check the path and the permissions",
            )
        })?;
        OpTable::read_from(opened, file)
    }

    /// As [`OpTable::read`], from a file already open; errors name it `shown`.
    pub fn read_from(opened: File, shown: &Path) -> Result<OpTable, InputError> {
        let bytes = opened
            .metadata()
            .map_err(|e| InputError::new(shown, format!("cannot read the table: {e}"), ""))?
            .len();
        if bytes > BYTES_MAX {
            return Err(InputError::new(
                shown,
                format!("the file has {bytes} bytes, more than the {BYTES_MAX} a table may have"),
                "split the table or check that this is an op table",
            ));
        }
        let table = guarded(|| open(opened, bytes, shown))
            .unwrap_or_else(|damage| Err(corrupt(shown, damage)))?;
        table.check_latency()?;
        Ok(table)
    }

    /// The text column `name`, one value per row.
    ///
    /// # Errors
    /// The column is missing, has another type or holds a null.
    pub fn text(&self, name: &str) -> Result<&[Arc<str>], InputError> {
        match self.column(name)? {
            Column::Text(values) => Ok(values),
            other => Err(self.wrong_type(name, "text", other)),
        }
    }

    /// The integer column `name`, one value per row. Errors as for [`OpTable::text`].
    pub fn int(&self, name: &str) -> Result<&[i64], InputError> {
        match self.column(name)? {
            Column::Int(values) => Ok(values),
            other => Err(self.wrong_type(name, "integers", other)),
        }
    }

    /// The float column `name`, one value per row. Errors as for [`OpTable::text`].
    pub fn float(&self, name: &str) -> Result<&[f64], InputError> {
        match self.column(name)? {
            Column::Float(values) => Ok(values),
            other => Err(self.wrong_type(name, "floats", other)),
        }
    }

    /// The rows for which `keep(row)` holds (rows from zero), in their order.
    pub fn filter(&self, keep: impl Fn(usize) -> bool) -> OpTable {
        let rows: Vec<usize> = (0..self.rows).filter(|&row| keep(row)).collect();
        self.take(&rows)
    }

    /// The given rows (from zero, below the number of rows), in the given order.
    pub fn take(&self, rows: &[usize]) -> OpTable {
        let columns = self
            .columns
            .iter()
            .map(|column| match column {
                Column::Text(v) => Column::Text(rows.iter().map(|&r| Arc::clone(&v[r])).collect()),
                Column::Int(v) => Column::Int(rows.iter().map(|&r| v[r]).collect()),
                Column::Float(v) => Column::Float(rows.iter().map(|&r| v[r]).collect()),
                Column::Unusable { .. } => column.clone(),
            })
            .collect();
        OpTable {
            label: String::new(),
            file: self.file.clone(),
            names: self.names.clone(),
            columns,
            rows: rows.len(),
        }
    }

    /// Writes the table as Parquet, beside `file` first and then renamed over it, so that a reader
    /// sees the old file or the new one. Missing parent directories are made.
    ///
    /// # Errors
    /// A column is unusable or of another length than the table, or the file cannot be written.
    pub fn write(&self, file: &Path) -> Result<(), InputError> {
        replace_file(file, &self.encode()?)
    }

    /// The bytes that [`OpTable::write`] writes: the same table gives the same bytes.
    pub fn encode(&self) -> Result<Vec<u8>, InputError> {
        let schema = self.schema()?;
        let encoded = (|| -> Result<Vec<u8>, ParquetError> {
            let mut bytes = Vec::new();
            let mut writer =
                SerializedFileWriter::new(&mut bytes, schema, Arc::new(self.properties()?))?;
            let mut group = writer.next_row_group()?;
            for column in self.columns.iter() {
                let Some(mut out) = group.next_column()? else {
                    break;
                };
                match column {
                    Column::Text(values) => {
                        let values: Vec<ByteArray> =
                            values.iter().map(|v| ByteArray::from(&**v)).collect();
                        out.typed::<ByteArrayType>()
                            .write_batch(&values, None, None)?;
                    }
                    Column::Int(values) => {
                        out.typed::<Int64Type>().write_batch(values, None, None)?;
                    }
                    Column::Float(values) => {
                        out.typed::<DoubleType>().write_batch(values, None, None)?;
                    }
                    Column::Unusable { why, .. } => {
                        return Err(ParquetError::General(why.clone()));
                    }
                }
                out.close()?;
            }
            group.close()?;
            writer.close()?;
            Ok(bytes)
        })();
        encoded.map_err(|e| {
            InputError::new(
                &self.file,
                format!("cannot encode the table: {e}"),
                "check that every column has one value per row",
            )
        })
    }

    fn column(&self, name: &str) -> Result<&Column, InputError> {
        let Some(at) = self.names.iter().position(|n| n == name) else {
            return Err(InputError::new(
                &self.file,
                format!(
                    "no column of this name; the table has {}",
                    self.names.join(", ")
                ),
                "was it renamed upstream? import the version of the tables that this build expects",
            )
            .field(name));
        };
        match &self.columns[at] {
            Column::Unusable { row, why } => {
                let mut error = InputError::new(&self.file, why.clone(), HELP_REIMPORT).field(name);
                error.place.row = *row;
                Err(error)
            }
            column => Ok(column),
        }
    }

    fn wrong_type(&self, name: &str, expected: &str, found: &Column) -> InputError {
        let found = match found {
            Column::Text(_) => "text",
            Column::Int(_) => "integers",
            Column::Float(_) => "floats",
            Column::Unusable { why, .. } => why,
        };
        InputError::new(
            &self.file,
            format!(
                "the column holds {found} where {expected} are expected; the table has {}",
                self.names.join(", ")
            ),
            "was it renamed upstream? import the version of the tables that this build expects",
        )
        .field(name)
    }

    fn check_latency(&self) -> Result<(), InputError> {
        if !self.names.iter().any(|n| n == "latency") {
            return Ok(());
        }
        let values = self.float("latency")?;
        // Units differ between tables, so the bound is wide: a day in milliseconds.
        let Some(row) = values.iter().position(|v| !(*v > 0.0 && *v <= LATENCY_MAX)) else {
            return Ok(());
        };
        Err(InputError::new(
            &self.file,
            format!("latency is {}, not a positive number", values[row]),
            "remove the row or measure it again",
        )
        .row(row as u64 + 1)
        .field("latency"))
    }

    fn schema(&self) -> Result<Arc<SchemaType>, InputError> {
        let mut fields = Vec::with_capacity(self.columns.len());
        for (name, column) in self.names.iter().zip(self.columns.iter()) {
            let (length, physical, logical) = match column {
                Column::Text(v) => (v.len(), PhysicalType::BYTE_ARRAY, Some(LogicalType::String)),
                Column::Int(v) => (v.len(), PhysicalType::INT64, None),
                Column::Float(v) => (v.len(), PhysicalType::DOUBLE, None),
                Column::Unusable { row, why } => {
                    let mut error = InputError::new(
                        &self.file,
                        format!("cannot write the column: {why}"),
                        "drop the column first",
                    )
                    .field(name);
                    error.place.row = *row;
                    return Err(error);
                }
            };
            if length != self.rows {
                return Err(InputError::new(
                    &self.file,
                    format!(
                        "the column has {length} values and the table {} rows",
                        self.rows
                    ),
                    "give every column one value per row",
                )
                .field(name));
            }
            let field = SchemaType::primitive_type_builder(name, physical)
                .with_repetition(Repetition::REQUIRED)
                .with_logical_type(logical)
                .build()
                .map_err(|e| self.bad_schema(&e))?;
            fields.push(Arc::new(field));
        }
        let schema = SchemaType::group_type_builder("table")
            .with_fields(fields)
            .build()
            .map_err(|e| self.bad_schema(&e))?;
        Ok(Arc::new(schema))
    }

    fn bad_schema(&self, error: &ParquetError) -> InputError {
        InputError::new(
            &self.file,
            format!("cannot write these columns: {error}"),
            "check the column names",
        )
    }

    fn properties(&self) -> Result<WriterProperties, ParquetError> {
        // Statistics and page indexes outweigh the values in tables of this size. The writer's name
        // carries no version, so that an update of the Parquet crate does not change every file.
        let mut properties = WriterProperties::builder()
            .set_created_by("stepgate".to_string())
            .set_compression(Compression::ZSTD(ZstdLevel::try_new(9)?))
            .set_statistics_enabled(EnabledStatistics::None)
            .set_offset_index_disabled(true);
        for (name, column) in self.names.iter().zip(self.columns.iter()) {
            // Measured latencies rarely repeat: a dictionary would store each of them twice.
            if matches!(column, Column::Float(_)) {
                let path = ColumnPath::from(name.as_str());
                properties = properties
                    .set_column_dictionary_enabled(path.clone(), false)
                    .set_column_encoding(path, Encoding::BYTE_STREAM_SPLIT);
            }
        }
        Ok(properties.build())
    }
}

/// Writes `bytes` beside `file` and renames them over it. Missing parent directories are made.
pub fn replace_file(file: &Path, bytes: &[u8]) -> Result<(), InputError> {
    let fail = |e: std::io::Error| {
        InputError::new(
            file,
            format!("cannot write the file: {e}"),
            "check the directory's permissions and the free space",
        )
    };
    let parent = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(parent).map_err(fail)?;
    let mut builder = tempfile::Builder::new();
    // Temporary files are private by default; a table is as public as any file of the checkout.
    #[cfg(unix)]
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o666);
    #[cfg(unix)]
    builder.permissions(mode);
    let mut beside = builder.tempfile_in(parent).map_err(fail)?;
    beside.write_all(bytes).map_err(fail)?;
    beside.persist(file).map_err(|e| fail(e.error))?;
    Ok(())
}

fn corrupt(shown: &Path, what: impl Into<String>) -> InputError {
    InputError::new(shown, what, HELP_REIMPORT)
}

fn open(opened: File, bytes: u64, shown: &Path) -> Result<OpTable, InputError> {
    let reader = SerializedFileReader::new(opened)
        .map_err(|e| corrupt(shown, format!("not a readable Parquet table: {e}")))?;
    let metadata = reader.metadata();
    let descriptors = metadata.file_metadata().schema_descr().columns();
    let rows = usize::try_from(metadata.file_metadata().num_rows())
        .ok()
        .filter(|&rows| rows <= ROWS_MAX)
        .ok_or_else(|| {
            corrupt(
                shown,
                format!(
                    "the file declares {} rows; a table has 0 to {ROWS_MAX}",
                    metadata.file_metadata().num_rows()
                ),
            )
        })?;
    let names: Vec<String> = descriptors.iter().map(|d| d.path().string()).collect();
    for (at, name) in names.iter().enumerate() {
        if names[..at].contains(name) {
            return Err(corrupt(shown, "two columns have this name").field(name));
        }
    }
    for group in metadata.row_groups() {
        for (chunk, name) in group.columns().iter().zip(&names) {
            check_range(chunk, bytes, name, shown)?;
        }
    }

    let read = move |at: usize| {
        guarded(|| decode(&reader, at, rows)).unwrap_or_else(|damage| Column::Unusable {
            row: None,
            why: damage.to_owned(),
        })
    };
    Ok(OpTable {
        label: String::new(),
        file: shown.to_path_buf(),
        columns: Columns::on_demand(names.len(), Arc::new(read)),
        names,
        rows,
    })
}

/// Decodes one column.
fn decode(reader: &SerializedFileReader<File>, at: usize, rows: usize) -> Column {
    let metadata = reader.metadata();
    let descriptor = metadata.file_metadata().schema_descr().column(at);
    let mut column = empty_column(&descriptor);
    let mut texts = Interner::default();
    let unusable = |why: String| Column::Unusable { row: None, why };
    for group in 0..metadata.num_row_groups() {
        let declared = metadata.row_group(group).num_rows();
        let wanted = usize::try_from(declared).map_or(0, |n| n.min(ROWS_MAX));
        let chunk = reader
            .get_row_group(group)
            .and_then(|group| group.get_column_reader(at));
        let appended =
            chunk.and_then(|chunk| append(chunk, &descriptor, wanted, &mut texts, &mut column));
        if let Err(e) = appended {
            return unusable(format!("cannot read the column: {e}"));
        }
    }
    let found = values_in(&column);
    if found != rows && !matches!(column, Column::Unusable { .. }) {
        return unusable(format!(
            "the column has {found} values where the file declares {rows} rows"
        ));
    }
    column
}

/// The Parquet decoders assert on some corrupt input instead of returning an error. What is checked
/// beforehand is refused with a precise message; this keeps the rest from ending the process.
/// Nothing that was being built survives the unwinding.
fn guarded<T>(read: impl FnOnce() -> T) -> Result<T, &'static str> {
    catch_unwind(AssertUnwindSafe(read))
        .map_err(|_| "the file is damaged: its contents contradict each other")
}

/// Refuses a column chunk that lies outside the file: the reader would assert or allocate.
fn check_range(
    chunk: &ColumnChunkMetaData,
    bytes: u64,
    name: &str,
    shown: &Path,
) -> Result<(), InputError> {
    let start = chunk
        .dictionary_page_offset()
        .unwrap_or(chunk.data_page_offset());
    let end = u64::try_from(start)
        .ok()
        .and_then(|start| start.checked_add(u64::try_from(chunk.compressed_size()).ok()?));
    if end.is_none_or(|end| end > bytes) {
        return Err(corrupt(
            shown,
            format!("the column's data lies outside the file of {bytes} bytes"),
        )
        .field(name));
    }
    let unpacked = chunk.uncompressed_size();
    if u64::try_from(unpacked).map_or(true, |size| size > BYTES_MAX) {
        return Err(corrupt(
            shown,
            format!("the column declares {unpacked} bytes; at most {BYTES_MAX} are read"),
        )
        .field(name));
    }
    Ok(())
}

fn empty_column(descriptor: &ColumnDescriptor) -> Column {
    let unusable = |why: String| Column::Unusable { row: None, why };
    if descriptor.max_rep_level() > 0 || descriptor.path().parts().len() != 1 {
        return unusable("the column is nested; op tables are flat".to_string());
    }
    match descriptor.physical_type() {
        // Decimals are byte arrays or integers too; their plain bytes are not their value.
        _ if descriptor.converted_type() == ConvertedType::DECIMAL => {
            unusable("the column holds decimals; use a float".to_string())
        }
        PhysicalType::BYTE_ARRAY => Column::Text(Vec::new()),
        PhysicalType::INT64 | PhysicalType::INT32 => Column::Int(Vec::new()),
        PhysicalType::DOUBLE | PhysicalType::FLOAT => Column::Float(Vec::new()),
        other => unusable(format!(
            "the column has type {other}; text, integers and floats are read"
        )),
    }
}

/// Appends one row group's values to `column`, which becomes unusable at the first null.
fn append(
    chunk: ColumnReader,
    descriptor: &ColumnDescriptor,
    wanted: usize,
    texts: &mut Interner,
    column: &mut Column,
) -> Result<(), ParquetError> {
    let top = descriptor.max_def_level();
    let null = match (&mut *column, chunk) {
        (Column::Text(out), ColumnReader::ByteArrayColumnReader(reader)) => {
            read_values(reader, top, wanted, |batch| {
                out.reserve(batch.len());
                for value in batch {
                    out.push(texts.get(value)?);
                }
                Ok(())
            })?
        }
        (Column::Int(out), ColumnReader::Int64ColumnReader(reader)) => {
            read_values(reader, top, wanted, |batch| {
                out.extend_from_slice(batch);
                Ok(())
            })?
        }
        (Column::Int(out), ColumnReader::Int32ColumnReader(reader)) => {
            read_values(reader, top, wanted, |batch| {
                out.extend(batch.iter().map(|&v| i64::from(v)));
                Ok(())
            })?
        }
        (Column::Float(out), ColumnReader::DoubleColumnReader(reader)) => {
            read_values(reader, top, wanted, |batch| {
                out.extend_from_slice(batch);
                Ok(())
            })?
        }
        (Column::Float(out), ColumnReader::FloatColumnReader(reader)) => {
            read_values(reader, top, wanted, |batch| {
                out.extend(batch.iter().map(|&v| f64::from(v)));
                Ok(())
            })?
        }
        _ => None,
    };
    if let Some(rows_before) = null {
        let row = values_in(column) + rows_before + 1;
        *column = Column::Unusable {
            row: Some(row as u64),
            why: "the value is null".to_string(),
        };
    }
    Ok(())
}

/// Hands the values of one column chunk to `take`, batch by batch. Stops at the batch with the first
/// null (a definition level below `top`), which it does not hand over, and returns that value's
/// place within the batch.
fn read_values<T: DataType>(
    mut reader: ColumnReaderImpl<T>,
    top: i16,
    wanted: usize,
    mut take: impl FnMut(&[T::T]) -> Result<(), ParquetError>,
) -> Result<Option<usize>, ParquetError> {
    let mut batch: Vec<T::T> = Vec::with_capacity(wanted.min(BATCH_ROWS));
    let mut levels: Vec<i16> = Vec::new();
    let mut left = wanted;
    while left > 0 {
        batch.clear();
        levels.clear();
        let (records, values, _) =
            reader.read_records(left.min(BATCH_ROWS), Some(&mut levels), None, &mut batch)?;
        if records == 0 {
            break;
        }
        if values < records {
            return Ok(Some(levels.iter().position(|&l| l < top).unwrap_or(0)));
        }
        take(&batch)?;
        left -= records;
    }
    Ok(None)
}

fn values_in(column: &Column) -> usize {
    match column {
        Column::Text(v) => v.len(),
        Column::Int(v) => v.len(),
        Column::Float(v) => v.len(),
        Column::Unusable { .. } => 0,
    }
}

/// One allocation per distinct text of a column.
#[derive(Default)]
struct Interner {
    known: HashMap<Box<[u8]>, Arc<str>>,
    /// Tables are mostly sorted: the previous value is the likeliest.
    last: Option<Arc<str>>,
}

impl Interner {
    fn get(&mut self, value: &ByteArray) -> Result<Arc<str>, ParquetError> {
        let bytes = value.data();
        if let Some(last) = &self.last
            && last.as_bytes() == bytes
        {
            return Ok(Arc::clone(last));
        }
        let text = match self.known.get(bytes) {
            Some(text) => Arc::clone(text),
            None => {
                let text: Arc<str> = std::str::from_utf8(bytes)
                    .map_err(|e| ParquetError::General(format!("text is not UTF-8: {e}")))?
                    .into();
                self.known.insert(bytes.into(), Arc::clone(&text));
                text
            }
        };
        self.last = Some(Arc::clone(&text));
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tempfile::TempDir;

    fn text(values: &[&str]) -> Column {
        Column::Text(values.iter().map(|&v| v.into()).collect())
    }

    fn sample() -> OpTable {
        OpTable {
            label: String::new(),
            file: "sample.parquet".into(),
            names: ["kernel_source", "m", "latency"].map(String::from).into(),
            columns: vec![
                text(&["a", "b", "a", "a"]),
                Column::Int(vec![1, 2, 4, i64::MAX]),
                Column::Float(vec![0.001, 0.25, 1e-9, 3.5]),
            ]
            .into(),
            rows: 4,
        }
    }

    fn with_latency(latency: f64) -> OpTable {
        let mut table = sample();
        for column in &mut table.columns {
            if let Column::Float(values) = column {
                *values = vec![1.0, 2.0, latency, 4.0];
            }
        }
        table
    }

    /// Writes a Parquet file of one nullable INT32 column and one nullable FLOAT column.
    fn write_nullable(file: &Path, levels: &[i16]) {
        let schema = parquet::schema::parser::parse_message_type(
            "message t { optional int32 m; optional float latency; }",
        )
        .expect("schema");
        let out = File::create(file).expect("create");
        let mut writer =
            SerializedFileWriter::new(out, Arc::new(schema), Arc::default()).expect("writer");
        let mut group = writer.next_row_group().expect("group");
        let present = levels.iter().filter(|&&l| l == 1).count();
        let mut column = group.next_column().expect("column").expect("m");
        column
            .typed::<parquet::data_type::Int32Type>()
            .write_batch(&vec![-7; present], Some(levels), None)
            .expect("write");
        column.close().expect("close");
        let mut column = group.next_column().expect("column").expect("latency");
        column
            .typed::<parquet::data_type::FloatType>()
            .write_batch(&vec![0.5; levels.len()], Some(&vec![1; levels.len()]), None)
            .expect("write");
        column.close().expect("close");
        group.close().expect("close");
        writer.close().expect("close");
    }

    #[test]
    fn a_written_table_reads_back_equal_and_shares_its_texts() {
        let dir = TempDir::new().expect("dir");
        let file = dir.path().join("deep/er/t.parquet");
        sample().write(&file).expect("write");
        let read = OpTable::read(&file).expect("read");
        assert_eq!(read, OpTable { file, ..sample() });
        let texts = read.text("kernel_source").expect("text");
        assert!(Arc::ptr_eq(&texts[0], &texts[3]));
    }

    #[test]
    fn the_same_table_gives_the_same_bytes() {
        let one = sample().encode().expect("encode");
        let two = OpTable {
            label: String::new(),
            file: "elsewhere".into(),
            ..sample()
        }
        .encode()
        .expect("encode");
        assert_eq!(one, two);
    }

    #[test]
    fn an_empty_table_round_trips() {
        let dir = TempDir::new().expect("dir");
        let file = dir.path().join("t.parquet");
        let empty = sample().filter(|_| false);
        assert_eq!(empty.rows, 0);
        empty.write(&file).expect("write");
        assert_eq!(OpTable::read(&file).expect("read").rows, 0);
    }

    #[test]
    fn filter_keeps_order_and_every_column() {
        let kept = sample().filter(|row| row % 2 == 1);
        assert_eq!(kept.rows, 2);
        assert_eq!(kept.int("m").expect("m"), [2, i64::MAX]);
        assert_eq!(kept.float("latency").expect("latency"), [0.25, 3.5]);
        assert_eq!(&*kept.text("kernel_source").expect("text")[0], "b");
    }

    #[test]
    fn every_truncation_and_every_flipped_byte_is_an_error_or_a_table() {
        let dir = TempDir::new().expect("dir");
        let file = dir.path().join("t.parquet");
        let bytes = sample().encode().expect("encode");
        for length in 0..bytes.len() {
            fs::write(&file, &bytes[..length]).expect("write");
            let error = OpTable::read(&file).expect_err("a truncated file was read");
            assert_eq!(error.place.file, file);
        }
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0xff;
            fs::write(&file, &damaged).expect("write");
            // A flipped byte within the values can be a valid value; it must only not panic.
            match OpTable::read(&file) {
                Ok(table) => assert_eq!(table.columns.iter().count(), table.names.len()),
                Err(error) => assert_eq!(error.place.file, file),
            }
        }
    }

    #[test]
    fn another_kind_of_file_is_named() {
        let dir = TempDir::new().expect("dir");
        let file = dir.path().join("t.parquet");
        fs::write(&file, "n,k,latency\n1,2,3\n").expect("write");
        let error = OpTable::read(&file)
            .expect_err("a CSV file was read")
            .to_string();
        assert!(error.contains("t.parquet"), "{error}");
        assert!(error.contains("not a readable Parquet table"), "{error}");
        assert!(OpTable::read(&dir.path().join("none.parquet")).is_err());
    }

    #[test]
    fn a_renamed_or_retyped_column_lists_what_there_is() {
        let error = sample().int("n").expect_err("no column n").to_string();
        assert!(error.contains("sample.parquet `n`"), "{error}");
        assert!(error.contains("kernel_source, m, latency"), "{error}");
        assert!(error.contains("renamed"), "{error}");
        let error = sample().int("latency").expect_err("floats").to_string();
        assert!(error.contains("floats where integers"), "{error}");
    }

    #[test]
    fn a_latency_that_is_no_duration_names_row_column_and_value() {
        let dir = TempDir::new().expect("dir");
        let file = dir.path().join("t.parquet");
        for (latency, shown) in [
            (f64::NAN, "NaN"),
            (f64::INFINITY, "inf"),
            (0.0, "is 0,"),
            (-0.5, "-0.5"),
        ] {
            with_latency(latency).write(&file).expect("write");
            let error = OpTable::read(&file).expect_err("a bad latency was read");
            assert_eq!(error.place.row, Some(3));
            assert_eq!(error.place.field.as_deref(), Some("latency"));
            assert!(error.what.contains(shown), "{error}");
        }
    }

    #[test]
    fn a_null_is_an_error_where_its_column_is_asked_for() {
        let dir = TempDir::new().expect("dir");
        let file = dir.path().join("t.parquet");
        let mut levels = vec![1; BATCH_ROWS + 10];
        levels[BATCH_ROWS + 3] = 0;
        write_nullable(&file, &levels);
        let table = OpTable::read(&file).expect("read");
        assert_eq!(table.float("latency").expect("latency")[0], 0.5);
        let error = table.int("m").expect_err("a null was read");
        assert_eq!(error.place.row, Some(BATCH_ROWS as u64 + 4));
        assert_eq!(error.place.field.as_deref(), Some("m"));
        assert!(table.encode().is_err(), "a null column was written");
    }

    #[test]
    fn narrow_types_are_widened() {
        let dir = TempDir::new().expect("dir");
        let file = dir.path().join("t.parquet");
        write_nullable(&file, &[1, 1]);
        let table = OpTable::read(&file).expect("read");
        assert_eq!(table.int("m").expect("m"), [-7, -7]);
        assert_eq!(table.float("latency").expect("latency"), [0.5, 0.5]);
    }

    #[test]
    fn a_column_of_the_wrong_length_is_not_written() {
        let mut table = sample();
        for column in &mut table.columns {
            if let Column::Int(values) = column {
                values.truncate(1);
            }
        }
        let error = table.encode().expect_err("a short column was written");
        assert_eq!(error.place.field.as_deref(), Some("m"));
    }
}
